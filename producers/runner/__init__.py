"""The programs that run users' code in processes of their own, with any Python from 3.9 and its standard library only.

``python FOLDER agents`` runs agents, ``python FOLDER environments`` environments. stdin is a socket with JSON lines.
``python FOLDER gymnasium_envs`` steps environments with numbers, with numpy and gymnasium beside.
"""
