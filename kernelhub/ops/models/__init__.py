"""What a model needs of the ops: `problems_of` lists its problems, from a name or a Hugging Face config.json."""
