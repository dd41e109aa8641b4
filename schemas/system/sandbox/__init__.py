"""Sandbox for programs that a model wrote, or that it steers: what they may not do, the system keeps them from.

Standard library only, so that reward services and generators both can use it. ``choose`` picks a way of this machine,
``Sandbox.run`` runs a program to its end within limits, ``Sandbox.start`` one that is talked to.
"""
