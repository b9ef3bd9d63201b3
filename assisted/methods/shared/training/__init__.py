"""What the trainers of several methods need: texts, features of the target, losses."""
