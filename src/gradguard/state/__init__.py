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
                      groups, plain attributes
`ModulePart`          weights, buffers, extra state   as its copier                 snapshots
`StepBuffers`         buffers that a forward writes   the device                    a skipped step
`calls.State`         buffers and generators, lent    the device                    the gradient check's many calls
                      anew to each call
`Snapshot`            all of these and objects with   the host, or files of plain   going back, a resumed run
                      a ``state_dict``                data
====================  ==============================  ============================  ===================================

Not kept: gradients, Python attributes of modules, generators that somebody holds by name, data loaders that are not
handed over.
"""
