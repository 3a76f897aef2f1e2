"""Beyond one machine: a check of any server against what gateways expect, and what Ray Serve runs.

Importing this package loads nothing; each module names what it needs."""
