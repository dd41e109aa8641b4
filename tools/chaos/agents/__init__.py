"""Agents in the chaos suite: a program that plays episodes, the faults that hit it, and a judge of what is trained."""
