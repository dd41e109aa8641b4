"""Deployment: how Tidemill is started, supervised, watched and measured."""
