"""A call on ranks, from what each is told to where its rows lie, and how they are made again."""
