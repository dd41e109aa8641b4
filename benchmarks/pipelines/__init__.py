"""The pipelines that `bench transport` compares: Tidemill's, bare Redis commands, and one hop of JSON."""
