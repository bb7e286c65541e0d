"""A module that a program of the tests imports: its functions and methods see Python's ``float``."""


def level(number):
    return 1 if float(number) < 0.01 else 2


class Controller:
    def __init__(self):
        self.coef = 1.0

    def update(self, kl):
        self.coef = 2.0 if float(kl) > 0.1 else self.coef
        return self.coef
