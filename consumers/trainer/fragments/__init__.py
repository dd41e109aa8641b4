"""Small policies that act in environments with numbers, in the place of models of tokens; all around is the same."""
