"""A stand-in that holds nothing: only its presence is asked for."""
