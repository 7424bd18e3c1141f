"""Products of more rows than one or two, and so few, with weights so small, that launches are what they cost."""
