"""Compare several methods in three scenarios, in one table."""

import everlearn
from everlearn import L2, Freeze, Method, nets, streams
from everlearn.results.report.overview import overview

results = []
for scenario in ("task", "domain", "class"):
    stream = streams.digits(scenario)
    for method in (Method(), L2(), Freeze()):
        results.append(everlearn.run(nets.mlp, method, stream, epochs=5, batch_size=32))

    # Joint training on all tasks is the upper bound.
    results.append(everlearn.run(nets.mlp, Method(), stream.joint(), epochs=5, batch_size=32))

print(overview(results))
