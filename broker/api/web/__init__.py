"""What every answer goes through: tokens and origins, problem documents, event streams."""
