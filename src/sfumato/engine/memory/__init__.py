"""What an engine takes of memory: predicted from shapes, and held against what there is."""
