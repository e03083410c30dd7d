"""The training state: how it is copied, restored in place, and written to files.

Each class restores the state in its row bit by bit, and leaves everything else unchanged.

====================  ==============================  ============================  ===================================
class                 keeps                           where                         for
====================  ==============================  ============================  ===================================
`generators`          Python's, NumPy's, torch's on   plain values                  any repeated run of a step or a call
                      each device in use
`Copier`,             any nest of containers and      the host; a further copy      snapshots, files
`Restorer`            tensors, tied ones once         takes no new memory
`UndoCopier`          the same; objects that are no   the device                    a skipped step
                      containers are not copied
`OptimizerCopy`       parameters, state, numbers of   as its copier                 skips, snapshots, parity
                      groups, plain attributes and
                      slots; newer ones are removed
`ModulePart`          weights, buffers, extra state   as its copier                 snapshots
`StepBuffers`         buffers that a forward writes   the device                    a skipped step
`Frozen`              buffers, or copies of them to   the device                    a repeated run or call: the
                      lend; generators; on request                                  gradient check, parity, the run
                      attributes, hooks, layers                                     of a few samples
`Snapshot`            all of these and objects with   the host, or files of plain   going back, a resumed run
                      a ``state_dict``                data
`WeightWatch`         no copy: torch's count of       checksums on the device       weights that were changed outside
                      writes, and checksums                                         of the optimizer
====================  ==============================  ============================  ===================================

Not kept: gradients, generators that an object holds by name, data loaders that are not passed, objects of an optimizer
that are not plain data, whether a weight is frozen. Only `Frozen` keeps Python attributes of modules.
"""
