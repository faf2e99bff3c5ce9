//! Transports around transports, and the way a run file makes them.

use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};
use zf_comm::{Counted, Delayed, Failing, Log, ThreadsConfig, When, wrap};
use zf_core::registry::{BuildContext, Registry};
use zf_core::slots;
use zf_core::stage::{Collective, Group, Reduce};

use crate::common::{complete, floats, issue, run, world};

fn sum(len: i64) -> Collective {
    Collective::AllReduce { tensor: Tensor::ones([len], (Kind::Float, Device::Cpu)), op: Reduce::Sum }
}

#[test]
fn counted_lists_what_was_accepted() {
    let log = Log::default();
    let handle = log.clone();
    let fabric = wrap(world(2), move |_, inner| Box::new(Counted::new(inner, handle.clone())));
    assert_eq!((fabric.world(), fabric.local_ranks()), (2, vec![0, 1]));
    let counters = run(&fabric, |rank, mut transport| {
        let group = Group::world(2);
        let uneven = Collective::ReduceScatter {
            inputs: vec![floats(&[1.0]), floats(&[1.0, 2.0])],
            output: Tensor::zeros([rank as i64 + 1], (Kind::Float, Device::Cpu)),
            accumulate: false,
        };
        issue(&mut *transport, &group, "refused", Collective::Broadcast { tensor: floats(&[1.0]), root: 9 })
            .expect_err("there is no member 9");
        complete(&mut *transport, &group, "grads", uneven).expect("both take part");
        complete(&mut *transport, &group, "norm", sum(10)).expect("both take part");
        transport.exchange("agree", vec![0; 5]).expect("both take part");
        transport.bytes()
    });
    let records = log.take();
    assert!(log.records().is_empty());
    for (rank, counter) in counters.iter().enumerate() {
        let mine: Vec<_> =
            records.iter().filter(|r| r.rank == rank).map(|r| (r.kind, r.label.as_str(), r.bytes)).collect();
        let scattered = if rank == 0 { 8 } else { 4 };
        let expected = [("reduce_scatter", "grads", scattered), ("all_reduce", "norm", 40), ("exchange", "agree", 5)];
        assert_eq!(mine, expected);
        assert_eq!((counter.reduce_scatter, counter.all_reduce, counter.control), (scattered, 40, 5));
    }
}

#[test]
fn delays_queue_and_do_not_hold_the_caller() {
    const DELAY: Duration = Duration::from_millis(60);
    let fabric = wrap(world(2), |_, inner| Box::new(Delayed::new(inner, DELAY)));
    run(&fabric, |_, mut transport| {
        let group = Group::world(2);
        let start = Instant::now();
        let tickets: Vec<_> =
            (0..4).map(|i| issue(&mut *transport, &group, &format!("{i}"), sum(10)).expect("fits")).collect();
        for ticket in tickets {
            ticket.wait().expect("both take part");
            // Never too early; how much later is up to the machine.
            assert!(start.elapsed() >= DELAY);
        }
        let blobs = transport.exchange("bytes", vec![7]).expect("both take part");
        assert_eq!(blobs, [[7], [7]]);
    });
}

#[test]
fn a_delayed_transport_ends_without_waiting_for_its_queue() {
    let fabric = wrap(world(2), |_, inner| Box::new(Delayed::new(inner, Duration::from_secs(3600))));
    let issued = std::sync::Barrier::new(2);
    let errors = run(&fabric, |rank, mut transport| {
        let group = Group::world(2);
        // Completes within at once, and after an hour outside.
        let slow = issue(&mut *transport, &group, "slow", sum(10)).expect("fits");
        issued.wait();
        if rank == 1 {
            transport.abort("had enough");
        }
        drop(transport);
        slow.wait().err().map(|error| error.to_string())
    });
    for error in errors.into_iter().flatten() {
        assert!(error.contains("had enough") || error.contains("left"), "{error}");
    }
}

#[test]
fn failing_breaks_at_its_moment() {
    for (when, at_issue) in [(When::Issue(2), true), (When::Wait(2), false)] {
        let fabric = wrap(world(2), move |rank, inner| match rank {
            1 => Box::new(Failing::new(inner, when, "the cable was cut")),
            _ => inner,
        });
        let errors = run(&fabric, |rank, mut transport| {
            for step in 0..2 {
                transport.exchange("before", vec![step]).expect("both take part");
            }
            let ticket = issue(&mut *transport, &Group::world(2), "then", sum(3));
            // The other rank may hear of the failure before it issues.
            assert!(rank == 0 || ticket.is_err() == at_issue);
            let error = ticket.and_then(|ticket| ticket.wait()).err().map(|error| error.to_string());
            if let (1, Some(error)) = (rank, &error) {
                transport.abort(error);
            }
            error
        });
        assert_eq!(errors[1].as_deref(), Some("the cable was cut"));
        // At the wait, the collective had completed for the other.
        assert_eq!(errors[0].as_deref(), at_issue.then_some("rank 1 failed: the cable was cut"));
    }
}

#[test]
fn a_run_file_makes_the_transport_by_name() {
    let registry = Registry::global().expect("no duplicates");
    let table = toml::toml! {
        kind = "threads"
        ranks = 4
        timeout = "500ms"
    };
    let fabric = registry.build::<slots::Transport>(&table, &BuildContext::default()).expect("the settings are right");
    assert_eq!((fabric.world(), fabric.timeout()), (4, Duration::from_millis(500)));
    assert_eq!(fabric.ranks_per_node(), 4, "one machine");
    for (text, expected) in [
        ("ranks = 0", "expected 1 to 1024 ranks in one process, found 0"),
        ("ranks = 100000", "found 100000"),
        ("timeout = \"soon\"", "expected a duration such as"),
        ("rank = 2", "unknown key `rank`"),
        ("ranks = 6\nranks_per_node = 4", "expected a number that divides ranks = 6, found 4"),
        ("ranks_per_node = 0", "expected a number that divides ranks = 1, found 0"),
    ] {
        let table: toml::Table = toml::from_str(text).expect("this is TOML");
        let error = registry.build::<slots::Transport>(&table, &BuildContext::default()).err();
        let error = format!("{:#}", error.expect(text));
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn settings_survive_a_round_trip() {
    let config = ThreadsConfig { ranks: 3, timeout: Duration::from_millis(1500), ..ThreadsConfig::default() };
    let text = toml::to_string(&config).expect("plain settings");
    assert_eq!(text, "ranks = 3\ntimeout = \"1500ms\"\n");
    assert_eq!(toml::from_str::<ThreadsConfig>(&text).expect("just written"), config);
    let nodes = ThreadsConfig { ranks_per_node: Some(1), ..config };
    let text = toml::to_string(&nodes).expect("plain settings");
    assert_eq!(toml::from_str::<ThreadsConfig>(&text).expect("just written"), nodes);
    let defaults: ThreadsConfig = toml::from_str("").expect("all have defaults");
    assert_eq!((defaults.ranks, defaults.timeout), (1, Duration::from_secs(60)));
}
