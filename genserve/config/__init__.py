"""Config: config.pbtxt to a frozen ModelConfig, by Triton's official schema.

Nothing is imported here, because the schema's parser takes time to load and the values do not need it.
"""
