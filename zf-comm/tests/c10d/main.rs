//! The `c10d` transport between real processes.

#[path = "../all/common.rs"]
#[allow(dead_code, reason = "shared with the tests of the other transports")]
mod common;
mod faults;
mod namespaces;
mod processes;
mod same;

/// Not a test: the process of one rank, which runs the scenario that its parent names.
#[test]
fn rank_process() {
    processes::become_rank(&[same::SCENARIOS, faults::SCENARIOS, namespaces::SCENARIOS].concat());
}
