"""The tensor operations of a step, each defined by a plain-torch reference."""
