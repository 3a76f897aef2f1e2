"""HTTP APIs for replies, one file each: how a body is parsed, and how a reply is rendered."""
