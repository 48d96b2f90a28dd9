"""Gives each instance of `make check-solver` to HiGHS and compares.

Reads the lines of the `solve_instances` example on stdin. Fails when a proven gap exceeds 1e-4, the median
time is a second or more, an answer breaks a limit, or HiGHS (same gap asked, 30 s) finds a lower cost.
"""

import json
import statistics
import sys

import highspy

GAP = 1e-4
SECONDS = 30.0


def highs(problem):
    """Cost and dual bound that HiGHS reaches."""
    solver = highspy.Highs()
    solver.silent()
    solver.setOptionValue("mip_rel_gap", GAP)
    solver.setOptionValue("time_limit", SECONDS)
    solver.setOptionValue("threads", 1)
    sums = [[] for _ in problem["limits"]]
    cost = []
    for group in problem["groups"]:
        variables = [solver.addBinary() for _ in group]
        solver.addConstr(sum(variables[1:], variables[0] + 0) == 1)
        for variable, item in zip(variables, group):
            cost.append(item["cost"] * variable)
            for terms, use in zip(sums, item["uses"]):
                terms.append(use * variable)
    for terms, limit in zip(sums, problem["limits"]):
        solver.addConstr(solver.qsum(terms) <= limit)
    solver.minimize(solver.qsum(cost))
    info = solver.getInfo()
    return info.objective_function_value, info.mip_dual_bound, solver.getRunTime()


def broken(problem, solution):
    """Recomputes cost and uses; says what is wrong, if anything."""
    chosen = [group[index] for group, index in zip(problem["groups"], solution["chosen"])]
    if len(chosen) != len(problem["groups"]):
        return "not one item a group"
    cost = sum(item["cost"] for item in chosen)
    if abs(cost - solution["cost"]) > 1e-9 * abs(cost):
        return f"cost {solution['cost']} but the items cost {cost}"
    for row, limit in enumerate(problem["limits"]):
        used = sum(item["uses"][row] for item in chosen)
        if used > limit * (1 + 1e-9):
            return f"limit {row}: {used} of {limit}"
    return None


def main():
    failures, seconds, gaps = [], [], []
    for line in sys.stdin:
        record = json.loads(line)
        problem, solution = record["problem"], record["solution"]
        theirs, bound, their_seconds = highs(problem)
        ours = solution["cost"]
        seconds.append(record["seconds"])
        gaps.append(solution["gap"])
        name = f"instance {record['instance']:2} ({record['kind']})"
        print(
            f"{name}: {ours:.4f} in {record['seconds']:.2f} s, gap {solution['gap']:.1e};"
            f" HiGHS {theirs:.4f} in {their_seconds:.1f} s",
            flush=True,
        )
        if reason := broken(problem, solution):
            failures.append(f"{name}: {reason}")
        if solution["gap"] > GAP:
            failures.append(f"{name}: gap {solution['gap']:.2e} above {GAP}")
        if ours > theirs + 1e-9 * abs(theirs):
            failures.append(f"{name}: {ours} is worse than HiGHS's {theirs}")
        if solution["lower_bound"] > theirs + 1e-9 * abs(theirs):
            failures.append(f"{name}: the lower bound {solution['lower_bound']} is above HiGHS's {theirs}")
    median = statistics.median(seconds) if seconds else float("inf")
    if len(seconds) != 20:
        failures.append(f"{len(seconds)} instances, expected 20")
    if median >= 1.0:
        failures.append(f"median {median:.2f} s, expected under 1 s")
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"largest gap {max(gaps, default=1):.1e}, median {median:.3f} s, {len(failures)} failures")
    return 1 if failures else 0


sys.exit(main())
