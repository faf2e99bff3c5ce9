//! Wrappers that change when collectives complete: results and promised orders stay.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};
use zf_comm::{Blocking, Delayed, ModelledConfig, Reordering, ReorderingConfig, Tier, wrap};
use zf_core::stage::{Channel, Collective, Fabric, Group, Reduce, Ticket, Transport};

use crate::common::{bits, issue, noise, run, world};

const CHANNELS: [Channel; 3] = [Channel::Control, Channel::Gradients, Channel::Parameters];

fn tier(bandwidth: &str, latency: Duration) -> Tier {
    Tier { bandwidth: bandwidth.parse().expect("the test's own"), latency }
}

fn sum(tensor: &Tensor) -> Collective {
    Collective::AllReduce { tensor: tensor.shallow_clone(), op: Reduce::Sum }
}

fn zeros(len: i64) -> Tensor {
    Tensor::zeros([len], (Kind::Float, Device::Cpu))
}

fn wrapped<W: Transport + 'static>(
    ranks: usize,
    with: impl Fn(Box<dyn Transport>) -> W + Send + Sync + 'static,
) -> Arc<dyn Fabric> {
    wrap(world(ranks), move |_, inner| Box::new(with(inner)))
}

fn reordering(seed: u64, window: Duration) -> impl Fn(Box<dyn Transport>) -> Reordering {
    move |inner| Reordering::new(inner, &ReorderingConfig { seed, window })
}

/// All kinds of collectives on all channels, in flight at once; the bits of every result, by rank.
fn results(fabric: &Arc<dyn Fabric>) -> Vec<Vec<Vec<u8>>> {
    run(fabric, |rank, mut transport| {
        let world = fabric.world();
        let (mut tickets, mut tensors) = (Vec::new(), Vec::new());
        for (number, channel) in CHANNELS.into_iter().cycle().take(12).enumerate() {
            let group = Group::world(world).on(channel);
            let mine = |at: usize| noise((number * 64 + rank * 8 + at) as u64, 50 + at, Kind::Float);
            let (output, others) = (zeros(50 + rank as i64), (0..world).map(|m| zeros(50 + m as i64)));
            let collective = match number % 4 {
                0 => {
                    let tensor = mine(0);
                    tensors.push(tensor.shallow_clone());
                    sum(&tensor)
                }
                1 => {
                    tensors.push(output.shallow_clone());
                    Collective::ReduceScatter { inputs: (0..world).map(mine).collect(), output, accumulate: true }
                }
                2 => {
                    let outputs: Vec<_> = others.collect();
                    tensors.extend(outputs.iter().map(Tensor::shallow_clone));
                    Collective::AllGather { input: mine(rank), outputs }
                }
                _ => Collective::Exchange { bytes: vec![rank as u8, number as u8] },
            };
            tickets.push(issue(&mut *transport, &group, &format!("number {number}"), collective).expect("fits"));
        }
        let mut all: Vec<Vec<u8>> =
            tickets.into_iter().rev().map(|ticket| ticket.bytes().expect("all take part").concat()).collect();
        all.extend(tensors.iter().map(bits));
        all
    })
}

#[test]
fn results_do_not_depend_on_when_collectives_complete() {
    let plain = results(&world(3));
    let millisecond = Duration::from_millis(1);
    let model = ModelledConfig {
        intra: tier("1GB/s", millisecond),
        inter: tier("1MB/s", millisecond),
        ranks_per_node: Some(1),
    };
    assert_eq!(results(&model.around(world(3)).expect("fits")), plain);
    assert_eq!(results(&wrapped(3, move |inner| Delayed::new(inner, millisecond))), plain);
    assert_eq!(results(&wrapped(3, Blocking::new)), plain);
    for seed in 0..3 {
        let reordered = || wrapped(3, reordering(seed, 3 * millisecond));
        assert_eq!(results(&reordered()), plain, "seed {seed}");
        let both = wrap(reordered(), |_, inner| Box::new(Delayed::new(inner, Duration::from_micros(100))));
        assert_eq!(results(&both), plain, "seed {seed}");
    }
}

/// The numbers of the tickets in the order in which they complete.
fn completion(tickets: &[Ticket]) -> Vec<usize> {
    let mut order = Vec::new();
    while order.len() < tickets.len() {
        // The last first: if it is done, so must be those before it in its group.
        let seen: Vec<usize> = (0..tickets.len()).rev().filter(|at| tickets[*at].is_done()).collect();
        order.extend(seen.into_iter().rev().filter(|at| !order.contains(at)).collect::<Vec<_>>());
        std::thread::yield_now();
    }
    order
}

#[test]
fn reordering_changes_the_order_between_groups_and_never_within_one() {
    let deadline = Instant::now() + Duration::from_secs(20);
    // Whether ranks see another order depends on when they look; they look until one does.
    for seed in 0.. {
        assert!(Instant::now() < deadline, "no seed changes the order");
        let fabric = wrapped(2, reordering(seed, Duration::from_millis(4)));
        let orders = run(&fabric, |_, mut transport| {
            let tensors: Vec<_> = (0..6).map(|_| zeros(3)).collect();
            let tickets: Vec<_> = tensors
                .iter()
                .zip(CHANNELS.into_iter().cycle())
                .map(|(tensor, channel)| issue(&mut *transport, &Group::world(2).on(channel), "", sum(tensor)))
                .collect::<Result<_, _>>()
                .expect("fits");
            let order = completion(&tickets);
            tickets.into_iter().for_each(|ticket| ticket.wait().expect("both take part"));
            order
        });
        for order in &orders {
            let place = |number: usize| order.iter().position(|at| *at == number);
            assert!((0..3).all(|at| place(at) < place(at + 3)), "{order:?}");
        }
        if orders.iter().any(|order| !order.is_sorted()) {
            return;
        }
    }
}

/// Each rank waits for a collective that the other issues after one that waits for this rank: legal, since they are of different
/// channels, and a wrapper that hands on results in the order of issue would make both wait for the timeout.
#[test]
fn collectives_of_different_channels_do_not_hold_each_other_up() {
    let delay = Duration::from_millis(1);
    let model = || ModelledConfig { intra: tier("1GB/s", delay), inter: tier("1GB/s", delay), ranks_per_node: Some(1) };
    for fabric in [
        wrapped(2, move |inner| Delayed::new(inner, delay)),
        wrapped(2, reordering(7, delay)),
        model().around(world(2)).expect("fits"),
    ] {
        run(&fabric, |rank, mut transport| {
            let mut go = |channel, label: &str| {
                issue(&mut *transport, &Group::world(2).on(channel), label, sum(&zeros(2))).expect("fits")
            };
            let tickets = if rank == 0 {
                let late = go(Channel::Gradients, "late");
                go(Channel::Control, "first").wait().expect("both take part");
                vec![late, go(Channel::Control, "second"), go(Channel::Parameters, "third")]
            } else {
                let (first, second) = (go(Channel::Control, "first"), go(Channel::Control, "second"));
                go(Channel::Parameters, "third").wait().expect("both take part");
                vec![first, second, go(Channel::Gradients, "late")]
            };
            tickets.into_iter().for_each(|ticket| ticket.wait().expect("both take part"));
        });
    }
}

#[test]
fn blocking_completes_before_issue_returns() {
    run(&wrapped(2, Blocking::new), |rank, mut transport| {
        let tensor = Tensor::from_slice(&[rank as f32 + 1.0]);
        let ticket = issue(&mut *transport, &Group::world(2), "sum", sum(&tensor)).expect("fits");
        assert!(ticket.is_done());
        assert_eq!(f64::try_from(&tensor).expect("a scalar"), 3.0);
        ticket.wait().expect("complete");
        assert_eq!(transport.exchange("bytes", vec![9]).expect("both take part"), [[9], [9]]);
    });
}

#[test]
fn modelled_links_are_never_faster_than_told() {
    let latency = Duration::from_millis(4);
    let model =
        ModelledConfig { intra: tier("4MB/s", latency), inter: tier("1MB/s", latency), ranks_per_node: Some(2) };
    let fabric = model.around(world(4)).expect("fits");
    assert_eq!(fabric.ranks_per_node(), 2);
    run(&fabric, |rank, mut transport| {
        let node = Group::new(vec![rank / 2 * 2, rank / 2 * 2 + 1]);
        let across = Group::new(vec![rank % 2, rank % 2 + 2]);
        // 40,000 bytes are 10 ms inside a node, 40 ms between nodes.
        for (group, milliseconds) in [(&node, 10), (&across, 40), (&Group::world(4), 60)] {
            let start = Instant::now();
            let tickets: Vec<_> =
                (0..2).map(|_| issue(&mut *transport, group, "sum", sum(&zeros(10_000))).expect("fits")).collect();
            for (number, ticket) in tickets.into_iter().enumerate() {
                ticket.wait().expect("all take part");
                let least = Duration::from_millis(milliseconds) * (number as u32 + 1) + latency;
                assert!(start.elapsed() >= least, "{group:?}, number {number}: {:?}", start.elapsed());
            }
        }
        // A message of a few bytes takes the latency, and a group of one rank nothing to wait for.
        let start = Instant::now();
        transport.exchange("bytes", vec![1]).expect("all take part");
        assert!(start.elapsed() >= latency);
        assert!(issue(&mut *transport, &Group::new(vec![rank]), "alone", sum(&zeros(9))).expect("fits").is_done());
    });
}

#[test]
fn links_inside_a_node_do_not_wait_for_those_between_nodes() {
    let hour = Duration::from_secs(3600);
    let model = ModelledConfig {
        intra: tier("1GB/s", Duration::from_micros(1)),
        inter: tier("1GB/s", hour),
        ranks_per_node: None,
    };
    let config = zf_comm::ThreadsConfig { ranks: 4, ranks_per_node: Some(2), ..Default::default() };
    let threads = zf_comm::Threads::new(&config).expect("fits");
    let fabric = model.around(Arc::new(threads)).expect("fits");
    // A rank that leaves ends what the others wait for.
    let seen = std::sync::Barrier::new(4);
    run(&fabric, |rank, mut transport| {
        let node = Group::new(vec![rank / 2 * 2, rank / 2 * 2 + 1]);
        let slow = issue(&mut *transport, &Group::world(4), "slow", sum(&zeros(9))).expect("fits");
        issue(&mut *transport, &node, "fast", sum(&zeros(9))).expect("fits").wait().expect("both take part");
        let done = slow.is_done();
        seen.wait();
        assert!(!done);
    });
}
