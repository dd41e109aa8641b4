"""Small policies that act in environments with numbers; their step takes the place of the step over tokens."""
