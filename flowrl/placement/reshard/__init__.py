"""How weights get from one layout to another: who hosts what, and which box goes where."""
