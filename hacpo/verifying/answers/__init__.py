"""What a final answer says, as text and as mathematics; knows nothing else of hacpo."""
