"""Who waits, who has a slot, and whose work is done next: bookkeeping on the host."""
