"""Environments with numbers: the workflow plays them with a small policy, and makes fragments of their steps.

Environments live on between fragments, and nothing of them is saved: a fragment that a killed generator had begun is
played again elsewhere, from fresh episodes. The files here know neither the broker nor PyTorch.
"""
