//! How collectives end that cannot complete: with an error on every rank, in time.

use std::time::Duration;

use tch::{Device, Kind, Tensor};
use zf_core::Result;
use zf_core::stage::{Collective, Group, Reduce, Transport};

use crate::common::{complete, floats, issue, noise, run, threads, world};

fn message<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("an error was expected"),
        Err(error) => error.to_string(),
    }
}

fn all_reduce(len: usize, kind: Kind) -> Collective {
    Collective::AllReduce { tensor: Tensor::zeros([len as i64], (kind, Device::Cpu)), op: Reduce::Sum }
}

/// Waits for a collective of the world and gives its error.
fn refused(transport: &mut dyn Transport, label: &str, collective: Collective) -> String {
    let group = Group::world(transport.world());
    message(complete(transport, &group, label, collective))
}

#[test]
fn lengths_that_differ_are_named_on_every_rank() {
    let errors = run(&world(3), |rank, mut transport| {
        let len = if rank == 1 { 16 } else { 12 };
        let first = refused(&mut *transport, "grads", all_reduce(len, Kind::Float));
        // The next one is not harmed.
        let group = Group::world(3);
        complete(&mut *transport, &group, "after", all_reduce(5, Kind::Float)).expect("these agree");
        first
    });
    for error in errors {
        assert!(error.starts_with("all_reduce #0 \"grads\" in group [0, 1, 2]: rank "), "{error}");
        for part in ["rank 1 has", "16 elements of float32", "12 elements of float32"] {
            assert!(error.contains(part), "{error}");
        }
    }
}

#[test]
fn what_all_ranks_bring_must_agree() {
    type Case = (fn(usize) -> Collective, &'static str);
    let cases: [Case; 5] = [
        (
            |rank| all_reduce(4, if rank == 0 { Kind::Float } else { Kind::Double }),
            "rank 0 has 4 elements of float32, but rank 1 has 4 elements of float64",
        ),
        (
            |rank| Collective::AllReduce {
                tensor: floats(&[1.0]),
                op: if rank == 0 { Reduce::Sum } else { Reduce::Max },
            },
            "rank 0 has Sum, but rank 1 has Max",
        ),
        (
            |rank| Collective::Broadcast { tensor: floats(&[1.0]), root: rank },
            "rank 0 has root 0, but rank 1 has root 1",
        ),
        (
            |rank| Collective::AllGather {
                input: noise(1, 3 + rank, Kind::Float),
                outputs: vec![noise(1, 3, Kind::Float), noise(2, 7 - 3 * rank, Kind::Float)],
            },
            "rank 0 has 7 elements of float32 for piece 1, but rank 1 has 4 elements of float32 for piece 1",
        ),
        (
            |rank| Collective::AllToAll {
                inputs: vec![noise(1, 2, Kind::Float), noise(1, 2, Kind::Float)],
                outputs: vec![noise(1, 2 + rank, Kind::Float), noise(1, 2, Kind::Float)],
            },
            "rank 0 has 2 elements of float32 from member 0 to 1, but rank 1 has 3 elements of float32 from member 0 to 1",
        ),
    ];
    for (collective, expected) in cases {
        let errors = run(&world(2), |rank, mut transport| refused(&mut *transport, "check", collective(rank)));
        for error in errors {
            assert!(error.ends_with(expected), "{error}");
        }
    }
}

#[test]
fn different_collectives_at_one_place_name_both() {
    let errors = run(&world(2), |rank, mut transport| {
        let scatter = Collective::ReduceScatter {
            inputs: vec![floats(&[1.0]), floats(&[1.0])],
            output: floats(&[0.0]),
            accumulate: false,
        };
        let gather = Collective::AllGather { input: floats(&[1.0]), outputs: vec![floats(&[1.0]), floats(&[1.0])] };
        match rank {
            0 => refused(&mut *transport, "a", scatter),
            _ => refused(&mut *transport, "b", gather),
        }
    });
    for error in errors {
        assert!(error.contains("rank 0 issued reduce_scatter \"a\", but rank 1 issued all_gather \"b\""), "{error}");
    }
}

#[test]
fn wrong_requests_are_refused_when_issued() {
    run(&world(2), |rank, mut transport| {
        let two = || vec![floats(&[1.0]), floats(&[1.0])];
        let own = floats(&[1.0, 2.0]);
        let first = || own.narrow(0, 0, 1);
        let cases: Vec<(Group, Collective, &str)> = vec![
            (Group::new(vec![1 - rank]), all_reduce(1, Kind::Float), "this rank is not in the group"),
            (Group::new(vec![0, 1, 0]), all_reduce(1, Kind::Float), "names rank 0 twice"),
            (Group::new(vec![0, 1, 2]), all_reduce(1, Kind::Float), "names rank 2, but the world has 2 ranks"),
            (Group::world(2), all_reduce(1, Kind::Int), "a tensor of Int; supported are float32"),
            (
                Group::world(2),
                Collective::Broadcast { tensor: Tensor::zeros([2, 3], (Kind::Float, Device::Cpu)), root: 0 },
                "a tensor of shape [2, 3]; expected a 1-D one",
            ),
            (
                Group::world(2),
                Collective::Broadcast { tensor: noise(1, 6, Kind::Float).slice(0, 0, 6, 2), root: 0 },
                "contiguous",
            ),
            (Group::world(2), Collective::Broadcast { tensor: floats(&[1.0]), root: 2 }, "the root is member 2"),
            (Group::world(2), Collective::Broadcast { tensor: Tensor::new(), root: 0 }, "undefined"),
            (
                Group::world(2),
                Collective::AllGather { input: floats(&[1.0]), outputs: vec![floats(&[1.0])] },
                "1 outputs for a group of 2 members",
            ),
            (
                Group::world(2),
                Collective::ReduceScatter { inputs: two(), output: floats(&[1.0, 2.0]), accumulate: true },
                "does not add into an output of 2 elements of float32",
            ),
            (
                Group::world(2),
                Collective::ReduceScatter { inputs: two(), output: noise(1, 1, Kind::BFloat16), accumulate: true },
                "does not add into an output of 1 elements of bfloat16",
            ),
            (
                Group::world(2),
                Collective::ReduceScatter {
                    inputs: (0..2).map(|m| if m == rank { floats(&[1.0]) } else { first() }).collect(),
                    output: first(),
                    accumulate: true,
                },
                "overlaps an input that is not its own piece",
            ),
            (
                Group::world(2),
                Collective::AllGather {
                    input: first(),
                    outputs: (0..2).map(|m| if m == rank { floats(&[1.0]) } else { first() }).collect(),
                },
                "an output overlaps the input",
            ),
            (
                Group::world(2),
                Collective::AllToAll { inputs: vec![first(), first()], outputs: vec![first(), floats(&[1.0])] },
                "an output overlaps an input",
            ),
        ];
        for (group, collective, expected) in cases {
            let error = message(issue(&mut *transport, &group, "x", collective));
            assert!(error.contains(expected) && error.contains(&format!("rank {rank}: ")), "{error}");
        }
        // None of them took a place in the order.
        transport.barrier("end").expect("both take part");
    });
}

#[test]
fn a_released_storage_is_refused() {
    run(&world(1), |_, mut transport| {
        let tensor = floats(&[1.0, 2.0]);
        zf_sys::storage::resize_bytes(&tensor, 0).expect("libtorch's own memory");
        let collective = Collective::Broadcast { tensor, root: 0 };
        let error = message(issue(&mut *transport, &Group::world(1), "gone", collective));
        assert!(error.contains("released"), "{error}");
    });
}

#[test]
fn a_missing_rank_is_named_on_every_rank() {
    let fabric = threads(3, Duration::from_millis(300));
    let done = std::sync::Barrier::new(3);
    let errors = run(&fabric, |rank, mut transport| {
        transport.barrier("step 0").expect("all take part");
        let error = match rank {
            2 => None,
            _ => Some(refused(&mut *transport, "layer 3, bucket 0", all_reduce(100_000, Kind::Float))),
        };
        done.wait();
        // The last rank hears of it too.
        error.unwrap_or_else(|| message(transport.exchange("late", Vec::new())))
    });
    let expected = "all_reduce #1 \"layer 3, bucket 0\" in group [0, 1, 2]: rank 2 did not arrive within 300ms \
                    (arrived: 0, 1; rank 2 last issued #0 \"step 0\")";
    for error in errors {
        assert_eq!(error, expected);
    }
}

#[test]
fn a_rank_that_never_connects_is_named() {
    let fabric = threads(2, Duration::from_millis(100));
    let mut transport = fabric.connect(0).expect("the seat is free");
    let error = message(transport.exchange("hello", vec![1]));
    assert!(error.ends_with("within 100ms (arrived: 0; rank 1 never connected)"), "{error}");
}

#[test]
fn an_abort_ends_all_waits_with_the_first_reason() {
    // The timeout is long: the waits end by the abort alone.
    let errors = run(&world(4), |rank, mut transport| {
        if rank == 1 {
            transport.abort("the loss is NaN");
            transport.abort("something later");
            return message(transport.exchange("never", Vec::new()));
        }
        // Groups with and without the rank that fails.
        let group = if rank == 0 { Group::new(vec![0, 1]) } else { Group::new(vec![0, 2, 3]) };
        message(complete(&mut *transport, &group, "wait", all_reduce(100_000, Kind::Float)))
    });
    for error in errors {
        assert_eq!(error, "rank 1 failed: the loss is NaN");
    }
}

#[test]
fn leaving_ends_the_waits_of_the_groups_of_that_rank_only() {
    let errors = run(&world(3), |rank, mut transport| {
        if rank == 1 {
            return String::new();
        }
        let error = refused(&mut *transport, "sum", all_reduce(8, Kind::Float));
        let group = Group::new(vec![0, 2]);
        complete(&mut *transport, &group, "without", all_reduce(8, Kind::Float)).expect("both are here");
        error
    });
    for rank in [0, 2] {
        assert_eq!(errors[rank], "all_reduce #0 \"sum\" in group [0, 1, 2]: rank 1 left");
    }
}

#[test]
fn leaving_with_a_ticket_that_nobody_waited_for_is_no_hang() {
    let results = run(&world(2), |rank, mut transport| {
        let group = Group::world(2);
        let ticket = issue(&mut *transport, &group, "sum", all_reduce(100_000, Kind::Float));
        match rank {
            // Leaves at once, perhaps in the middle of it.
            0 => {
                drop(ticket);
                Ok(())
            }
            _ => ticket.and_then(|ticket| ticket.wait()),
        }
    });
    if let Err(error) = &results[1] {
        assert!(error.to_string().ends_with("rank 0 left"), "{error}");
    }
}

#[test]
fn a_panicking_rank_ends_the_others() {
    let fabric = world(2);
    let error = std::thread::scope(|scope| {
        let panicking = scope.spawn(|| {
            let _transport = fabric.connect(0).expect("the seat is free");
            panic!("as a plugin might");
        });
        let waiting = scope.spawn(|| {
            let mut transport = fabric.connect(1).expect("the seat is free");
            message(transport.exchange("wait", Vec::new()))
        });
        assert!(panicking.join().is_err());
        waiting.join().expect("the other rank does not panic")
    });
    assert_eq!(error, "rank 0 failed: its thread panicked");
}

#[test]
fn seats_are_taken_once() {
    let fabric = world(2);
    let transport = fabric.connect(0).expect("the seat is free");
    assert_eq!(fabric.connect(0).err().map(|e| e.to_string()).as_deref(), Some("rank 0 is connected already"));
    drop(transport);
    assert!(message(fabric.connect(0)).starts_with("rank 0 has left"));
    assert_eq!(message(fabric.connect(2)), "rank 2 does not exist: the world has 2 ranks");
}
