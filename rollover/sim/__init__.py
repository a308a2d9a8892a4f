"""The production scheduler under virtual time; engines, trainer and rewards are models. Nothing here needs torch."""
