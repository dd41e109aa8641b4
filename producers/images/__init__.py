"""Images of dataset rows and episodes, prepared for a model and placed in its prompt."""
