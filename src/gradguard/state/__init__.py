"""The training state: how it is copied, written back in place, and kept in files. Who puts something back asks here.

Each keeper gives back bit by bit what stands in its row, and leaves the rest alone.

====================  ==============================  ============================  ===================================
keeper                keeps                           where                         for
====================  ==============================  ============================  ===================================
`generators`          Python's, NumPy's, torch's on   plain values                  whatever runs a step or a call again
                      each device in use
`Copier`,             any nest of containers and      the host; a further copy      snapshots, files
`Restorer`            tensors, tied ones once         takes no new memory
`UndoCopier`          the same; objects that are no   the device                    a skipped step
                      containers stay themselves
`OptimizerCopy`       parameters, state, numbers of   as its copier                 skips, snapshots, parity
                      groups, plain attributes and
                      slots, and no newer ones
`ModulePart`          weights, buffers, extra state   as its copier                 snapshots
`StepBuffers`         buffers that a forward writes   the device                    a skipped step
`Frozen`              buffers, or copies of them to   the device                    a run or a call again: the
                      lend; generators; on request                                  gradient check, parity, the run
                      attributes, hooks, layers                                     of a few samples
`Snapshot`            all of these and objects with   the host, or files of plain   going back, a resumed run
                      a ``state_dict``                data
`WeightWatch`         no copy: how often torch wrote  checksums on the device       weights that something else than
                      the weights, and checksums                                    the optimizer has changed
====================  ==============================  ============================  ===================================

Not kept: gradients, generators that somebody holds by name, data loaders that are not handed over, objects of an
optimizer that are no plain data, whether a weight is frozen; Python attributes of modules by `Frozen` only.
"""
