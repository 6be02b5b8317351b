"""What kvledger costs and what it gains, measured in one run on one machine.

Numbers of different runs or machines are not comparable, so whatever is claimed here is a ratio of
two things measured side by side: with and without the connector, a copy into the arena and a plain
copy, an external hit and a local one. Importing this package costs nothing.
"""
