"""Compiled CPU twins of the operations, and the panels in which they want weights."""
