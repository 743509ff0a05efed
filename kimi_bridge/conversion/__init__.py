"""What a worker of a conversion does. Imports int4 alone, so that its process starts in torch's own time."""
