"""Start processes in milliseconds: fork them from a server process that has imported the libraries already.

Monarch starts a launcher (`forklauncher`), which asks the server (`forkserver`) for a fork. The launcher forwards its
signals to the fork and ends as the fork does. If the server gives no fork, the launcher runs the program itself.
"""
