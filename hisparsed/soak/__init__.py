"""The soak: a real node under random traffic and random moves, every answer open to proof.

The reference model's tokens depend on the token sequence alone, so an untouched second engine
can verify any answer. Finds what breaks; measures nothing of a model or a GPU.
"""
