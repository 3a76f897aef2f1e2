"""The network that reads pictures: a tower of layers over patches, and what the text network sees
of it.  Knows no files of pictures and no requests."""
