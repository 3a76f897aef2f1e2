"""Pictures: bytes of a file → pixels → patches.  Knows no network, no text and no requests."""
