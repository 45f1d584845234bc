"""How each head learns: one readable file a method, one shared loop."""
