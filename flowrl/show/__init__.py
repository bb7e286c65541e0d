"""``flowrl show``: one local page that follows live runs and opens finished ones. Reads their files, changes none."""
