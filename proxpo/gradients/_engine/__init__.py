"""Computes per-sequence gradients inside one backward pass, for the methods beside this folder.

transform           the public `Transform`: opens a block, moves the trailing averages
session             state of one block: layout, overlap sets, a handle per parameter and module
patching, module    exchange the forward of every module with trained parameters
autograd, experts   linear layers, embeddings, norms, banks of experts
compiled            the same layers under torch.compile, without a graph break
proxies, fallback   parameters that a module uses itself; modules run again
head                the language-model head, tile by tile, through the hook of `proxpo.logp`
position_gradients  G_t of one parameter as outer products, vectors or embedding rows
inner_products      F², N² and K from the G_t;  cost, measure  the cheapest form;  fused  Triton
layout, shard       the sequence of every position, on one rank or several
groups              the sequences that share a kernel
padded_rows         blocks in memory that stays where it is, for recordings
position_axes, axis_order, inputs, audit, averages, device    checks and small parts
"""
