"""What the adapters of several backends share: operands as libraries read them, scales in tiles, compiled operators."""
