"""This library as a plugin of RL frameworks, one file each. Importing the package imports nothing."""
