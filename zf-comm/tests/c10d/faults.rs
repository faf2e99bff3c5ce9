//! Ranks that die, stop, fail or stay away: every other one ends with a message that names them.

use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid, kill_process};
use tch::{Device, Kind, Tensor};
use zf_core::Result;
use zf_core::stage::{Channel, Collective, Group, Reduce, Transport};

use crate::common::{complete, issue};
use crate::processes::{Named, Ranks};

pub(crate) const SCENARIOS: &[Named] = &[
    ("kill-last", |rank, transport| dies(rank, 2, Signal::KILL, transport)),
    ("kill-host", |rank, transport| dies(rank, 0, Signal::KILL, transport)),
    ("stop-last", |rank, transport| dies(rank, 2, Signal::STOP, transport)),
    ("stop-host", |rank, transport| dies(rank, 0, Signal::STOP, transport)),
    ("kill-busy", |rank, transport| dies_in_the_middle(rank, Signal::KILL, transport)),
    ("stop-busy", |rank, transport| dies_in_the_middle(rank, Signal::STOP, transport)),
    ("away", away),
    ("abort-host", |rank, transport| aborts(rank, 0, transport)),
    ("abort-last", |rank, transport| aborts(rank, 2, transport)),
    ("panic", panics),
    ("leave", leaves),
    ("late", late),
    ("never", |_, mut transport| end_of(transport.exchange("hello", vec![1]))),
];

fn sum(len: i64) -> Collective {
    Collective::AllReduce { tensor: Tensor::ones([len], (Kind::Float, Device::Cpu)), op: Reduce::Sum }
}

fn end_of<T>(result: Result<T>) -> String {
    result.err().map_or_else(|| "no error".to_owned(), |error| error.to_string())
}

fn dies(rank: usize, victim: usize, signal: Signal, mut transport: Box<dyn Transport>) -> String {
    let world = Group::world(transport.world());
    complete(&mut *transport, &world, "step 0", sum(1000)).expect("all take part");
    if rank == victim {
        kill_process(getpid(), signal).expect("this process");
    }
    end_of(complete(&mut *transport, &world, "layer 3, bucket 0", sum(100_000)))
}

/// The victim has issued and is moving bytes.
fn dies_in_the_middle(rank: usize, signal: Signal, mut transport: Box<dyn Transport>) -> String {
    let world = Group::world(transport.world());
    transport.barrier("step 0").expect("all take part");
    let tickets: Vec<_> =
        (0..40).map(|_| issue(&mut *transport, &world, "big", sum(4_000_000)).expect("fits")).collect();
    if rank == 1 {
        std::thread::sleep(Duration::from_millis(150));
        kill_process(getpid(), signal).expect("this process");
    }
    let errors: Vec<_> = tickets.into_iter().filter_map(|ticket| ticket.wait().err()).collect();
    errors.first().map_or_else(|| "no error".to_owned(), ToString::to_string)
}

fn away(rank: usize, mut transport: Box<dyn Transport>) -> String {
    transport.barrier("step 0").expect("all take part");
    let gradients = Group::world(3).on(Channel::Gradients);
    if rank == 2 {
        // Alive, but busy with something else, until it hears of the end.
        let begin = Instant::now();
        loop {
            std::thread::sleep(Duration::from_millis(50));
            let error = transport.exchange("late", Vec::new());
            if begin.elapsed() > Duration::from_millis(1) || error.is_err() {
                return end_of(error);
            }
        }
    }
    end_of(complete(&mut *transport, &gradients, "layer 3", sum(100_000)))
}

fn aborts(rank: usize, who: usize, mut transport: Box<dyn Transport>) -> String {
    transport.barrier("step 0").expect("all take part");
    if rank == who {
        transport.abort("the loss is NaN");
        transport.abort("something later");
        return end_of(transport.exchange("never", Vec::new()));
    }
    // Groups with and without the rank that fails, connected and not.
    let group = if rank == 1 { Group::new(vec![0, 1, 2]) } else { Group::new(vec![who, rank]) };
    let begin = Instant::now();
    let end = end_of(complete(&mut *transport, &group, "wait", sum(100_000)));
    assert!(begin.elapsed() < Duration::from_secs(20), "the timeout did not end it");
    end
}

fn panics(rank: usize, mut transport: Box<dyn Transport>) -> String {
    transport.barrier("step 0").expect("all take part");
    if rank == 1 {
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _transport = transport;
            panic!("as a plugin might");
        }));
        return format!("{}", panicked.is_err());
    }
    end_of(transport.exchange("wait", Vec::new()))
}

fn leaves(rank: usize, mut transport: Box<dyn Transport>) -> String {
    transport.barrier("step 0").expect("all take part");
    if rank == 1 {
        return "left".into();
    }
    let error = end_of(complete(&mut *transport, &Group::world(3), "sum", sum(8)));
    complete(&mut *transport, &Group::new(vec![0, 2]), "without", sum(8)).expect("both are here");
    error
}

/// A rank may come late, as long as it comes within the timeout of those who wait.
fn late(rank: usize, mut transport: Box<dyn Transport>) -> String {
    let world = Group::world(2);
    let ticket = issue(&mut *transport, &world, "early", sum(10));
    if rank == 1 {
        // Longer than the timeout: nobody waits yet.
        std::thread::sleep(Duration::from_millis(1500));
        let second = issue(&mut *transport, &world, "second", sum(10)).expect("fits");
        return end_of(ticket.expect("fits").wait().and_then(|()| second.wait()));
    }
    let second = issue(&mut *transport, &world, "second", sum(10)).expect("fits");
    std::thread::sleep(Duration::from_millis(1200));
    end_of(ticket.expect("fits").wait().and_then(|()| second.wait()))
}

const SHORT: Duration = Duration::from_secs(2);
const LONG: Duration = Duration::from_secs(40);

#[test]
fn a_killed_rank_is_named() {
    // Long before the timeout.
    let mut ranks = Ranks::start("kill-last", 3, LONG);
    let begin = Instant::now();
    for error in ranks.results(0..2) {
        let expected = "all_reduce #1 \"layer 3, bucket 0\" in group [0, 1, 2]: rank 2 is gone, its connection broke (rank 2 \
                        last issued #0 \"step 0\")";
        assert_eq!(error, expected);
    }
    assert!(begin.elapsed() < LONG, "the timeout did not end it");
}

#[test]
fn a_killed_host_of_the_store_is_named() {
    for error in Ranks::start("kill-host", 3, LONG).results(1..3) {
        let expected = "all_reduce #1 \"layer 3, bucket 0\" in group [0, 1, 2]: rank 0, which hosts the store of the run, is \
                        gone (";
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn a_stopped_rank_is_named() {
    for error in Ranks::start("stop-last", 3, SHORT).results(0..2) {
        let expected = "all_reduce #1 \"layer 3, bucket 0\" in group [0, 1, 2]: rank 2 did not arrive within 2 s (arrived: \
                        0, 1; rank 2 last issued #0 \"step 0\" and shows no sign of life)";
        assert_eq!(error, expected);
    }
}

#[test]
fn a_stopped_host_of_the_store_is_named() {
    let expected = "all_reduce #1 \"layer 3, bucket 0\" in group [0, 1, 2]: it did not complete within 2 s, and rank 0, \
                    which hosts the store of the run, does not answer";
    for error in Ranks::start("stop-host", 3, SHORT).results(1..3) {
        assert_eq!(error, expected);
    }
}

#[test]
fn a_rank_killed_in_the_middle_is_named() {
    for error in Ranks::start("kill-busy", 3, LONG).results([0, 2]) {
        assert!(error.starts_with("all_reduce #"), "{error}");
        // Now and then a socket does not tell, and the heartbeat that stays away does, at the timeout.
        let broke = error.contains(" \"big\" in group [0, 1, 2]: rank 1 is gone, its connection broke (rank 1 last");
        let silent =
            error.contains(" \"big\" in group [0, 1, 2]: ") && error.contains("rank 1 arrived, but shows no sign");
        assert!(broke || silent, "{error}");
    }
}

#[test]
fn a_rank_stopped_in_the_middle_is_named() {
    for error in Ranks::start("stop-busy", 3, SHORT).results([0, 2]) {
        let expected = " \"big\" in group [0, 1, 2]: it did not complete within 2 s: rank 1 arrived, but shows no sign of \
                        life any more";
        assert!(error.starts_with("all_reduce #") && error.ends_with(expected), "{error}");
    }
}

#[test]
fn a_rank_that_stays_away_is_named_on_every_rank() {
    let expected = "all_reduce #0 \"layer 3\" in group [0, 1, 2]: rank 2 did not arrive within 2 s (arrived: 0, 1; rank 2 \
                    last issued #1 \"late\" in group [0, 1, 2])";
    for error in Ranks::start("away", 3, SHORT).results(0..3) {
        assert_eq!(error, expected);
    }
}

#[test]
fn a_rank_that_never_starts_is_named() {
    // A world of two of which only rank 0 is started.
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|s| s.local_addr()).expect("a free port").port();
    let prefix = |rank: usize| if rank == 1 { vec!["true".to_owned()] } else { vec!["env".to_owned()] };
    let error = Ranks::start_each("never", 2, SHORT, "127.0.0.1", port, prefix).result(0);
    let expected = "exchange #0 \"hello\" in group [0, 1]: rank 1 did not arrive within 2 s (arrived: 0; rank 1 never \
                    connected)";
    assert_eq!(error, expected);
}

#[test]
fn a_host_that_never_starts_is_named() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|s| s.local_addr()).expect("a free port").port();
    let prefix = |rank: usize| if rank == 0 { vec!["true".to_owned()] } else { vec!["env".to_owned()] };
    let error = Ranks::start_each("never", 2, SHORT, "127.0.0.1", port, prefix).result(1);
    let expected = format!("connect: rank 1: nobody listens at 127.0.0.1:{port}, where rank 0 should, within 2 s: ");
    assert!(error.starts_with(&expected), "{error}");
}

#[test]
fn an_abort_ends_all_waits_with_the_first_reason() {
    for (scenario, who) in [("abort-host", 0), ("abort-last", 2)] {
        for error in Ranks::start(scenario, 3, LONG).results(0..3) {
            assert_eq!(error, format!("rank {who} failed: the loss is NaN"));
        }
    }
}

#[test]
fn a_panicking_rank_ends_the_others() {
    let results = Ranks::start("panic", 3, LONG).results(0..3);
    assert_eq!(results, ["rank 1 failed: its thread panicked", "true", "rank 1 failed: its thread panicked"]);
}

#[test]
fn leaving_ends_the_waits_of_the_groups_of_that_rank_only() {
    let results = Ranks::start("leave", 3, LONG).results(0..3);
    let error = "all_reduce #1 \"sum\" in group [0, 1, 2]: rank 1 left";
    assert_eq!(results, [error, "left", error]);
}

#[test]
fn time_counts_from_the_wait() {
    let results = Ranks::start("late", 2, Duration::from_secs(1)).results(0..2);
    assert_eq!(results, ["no error", "no error"]);
}
