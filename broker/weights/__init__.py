"""Weight versions: manifests in a stream, bytes through a transport."""
