"""How good a selector is on a real model: generated questions, what a step read and missed, and what came of it."""
