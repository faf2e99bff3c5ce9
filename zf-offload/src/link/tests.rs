//! What all links promise, and what each adds.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, unbounded};
use tch::{Device, Kind, Tensor};
use zf_core::Result;
use zf_core::stage::{Arrived, Link, Links, Transfer, Way};
use zf_core::trace::{Lane, Trace};

use super::{CudaConfig, CudaLink, DirectConfig, DirectLink, EmulatedConfig, EmulatedLink};

const PATIENCE: Duration = Duration::from_secs(20);

type Outcome = Result<Arrived>;

fn transfer(way: Way, from: Tensor, to: Tensor) -> (Transfer, Receiver<Outcome>) {
    let (done, outcome) = unbounded();
    let done = Box::new(move |arrived| done.send(arrived).unwrap());
    (Transfer { way, from, to, label: "t".into(), moves: false, done }, outcome)
}

fn counting(numel: i64, kind: Kind) -> Tensor {
    Tensor::arange(numel, (Kind::Int64, Device::Cpu)).to_kind(kind)
}

fn empty(numel: i64, kind: Kind) -> Tensor {
    Tensor::zeros([numel], (kind, Device::Cpu))
}

fn emulated(bandwidth: &str, trace: &Trace) -> EmulatedLink {
    EmulatedLink::new(bandwidth.parse().unwrap(), Duration::from_micros(10), &[], trace).unwrap()
}

/// Every link on the CPU.
fn all(trace: &Trace) -> Vec<Arc<dyn Link>> {
    vec![
        Arc::new(DirectLink::new(trace)),
        Arc::new(emulated("10GB/s", trace)),
        Arc::new(CudaLink::on(Device::Cpu, &[], trace).unwrap()),
    ]
}

#[test]
fn bytes_arrive_and_are_counted() {
    let trace = Trace::new(0, 100);
    for link in all(&trace) {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Int64, Kind::Uint8] {
            let before = link.traffic();
            let size = kind.elt_size_in_bytes() as u64;
            let host = link.host_memory(100, kind).unwrap();
            assert_eq!((host.size(), host.kind(), host.data_ptr() as usize % 64), (vec![100], kind, 0));
            let (down, arrived) = transfer(Way::ToHost, counting(100, kind), host);
            link.issue(down).unwrap();
            let Arrived { from, to } = arrived.recv_timeout(PATIENCE).unwrap().unwrap();
            assert!(from.equal(&to));
            let (up, arrived) = transfer(Way::ToDevice, to.narrow(0, 50, 50), empty(50, kind));
            link.issue(up).unwrap();
            assert!(arrived.recv_timeout(PATIENCE).unwrap().unwrap().to.equal(&from.narrow(0, 50, 50)));
            let (mut column, arrived) = transfer(Way::ToHost, counting(7, kind), empty(7, kind));
            column.moves = true;
            link.issue(column).unwrap();
            arrived.recv_timeout(PATIENCE).unwrap().unwrap();
            let after = link.traffic();
            assert_eq!(after.to_host - before.to_host, 100 * size);
            assert_eq!(after.to_device - before.to_device, 50 * size);
            assert_eq!(after.moves - before.moves, 7 * size);
        }
    }
    assert!(trace.totals().seconds(Lane::ToHost) > 0.0 && trace.totals().seconds(Lane::ToDevice) > 0.0);
}

#[test]
fn transfers_of_one_direction_keep_their_order() {
    for link in all(&Trace::new(0, 0)) {
        let (sender, arrived) = unbounded();
        for i in 0..50 {
            let sender = sender.clone();
            let done = Box::new(move |_| sender.send(i).unwrap());
            let (from, to) = (counting(1 + (i * 37) % 1000, Kind::Float), empty(1 + (i * 37) % 1000, Kind::Float));
            link.issue(Transfer { way: Way::ToHost, from, to, label: "t".into(), moves: false, done }).unwrap();
        }
        let order: Vec<i64> = (0..50).map(|_| arrived.recv_timeout(PATIENCE).unwrap()).collect();
        assert_eq!(order, (0..50).collect::<Vec<_>>());
    }
}

#[test]
fn tensors_that_do_not_match_are_refused_and_done_is_told() {
    for link in all(&Trace::new(0, 0)) {
        for (from, to, text) in [
            (counting(3, Kind::Float), empty(4, Kind::Float), "3 x Float to 4 x Float"),
            (counting(3, Kind::Float), empty(3, Kind::Half), "3 x Float to 3 x Half"),
            (counting(6, Kind::Float).view([2, 3]), empty(6, Kind::Float), "as source, found [2, 3]"),
            (counting(3, Kind::Float), empty(6, Kind::Float).slice(0, 0, 6, 2), "as destination, found [3]"),
        ] {
            let (wrong, outcome) = transfer(Way::ToHost, from, to);
            let error = link.issue(wrong).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
            assert_eq!(outcome.try_recv().unwrap().unwrap_err().to_string(), error);
            assert!(outcome.try_recv().is_err(), "done ran twice");
        }
        let (right, outcome) = transfer(Way::ToHost, counting(3, Kind::Float), empty(3, Kind::Float));
        link.issue(right).expect("a refused transfer leaves the link whole");
        outcome.recv_timeout(PATIENCE).unwrap().unwrap();
    }
}

#[test]
fn overlapping_memory_is_refused() {
    let trace = Trace::new(0, 0);
    for link in [Arc::new(DirectLink::new(&trace)) as Arc<dyn Link>, Arc::new(emulated("1GB/s", &trace))] {
        let memory = counting(10, Kind::Float);
        let (wrong, _outcome) = transfer(Way::ToHost, memory.narrow(0, 0, 6), memory.narrow(0, 4, 6));
        let error = link.issue(wrong).unwrap_err().to_string();
        assert!(error.contains("overlap"), "{error}");
        let (right, _outcome) = transfer(Way::ToHost, memory.narrow(0, 0, 5), memory.narrow(0, 5, 5));
        link.issue(right).unwrap();
    }
}

#[test]
fn a_panic_after_a_transfer_makes_the_link_fail() {
    for link in all(&Trace::new(0, 0)) {
        let (from, to) = (counting(3, Kind::Float), empty(3, Kind::Float));
        let done = Box::new(|_: Outcome| panic!("no room for bucket 7"));
        // A direct link's own thread is this one; all the same nothing unwinds.
        link.issue(Transfer { way: Way::ToHost, from, to, label: "bad".into(), moves: false, done }).unwrap();
        // The next either sees the failure in `issue` or is told by `done`.
        let (next, outcome) = transfer(Way::ToHost, counting(3, Kind::Float), empty(3, Kind::Float));
        let _ = link.issue(next);
        let error = outcome.recv_timeout(PATIENCE).unwrap().unwrap_err().to_string();
        assert!(error.contains("transfer `bad` panicked: no room for bucket 7"), "{error}");
        let (last, outcome) = transfer(Way::ToDevice, counting(3, Kind::Float), empty(3, Kind::Float));
        assert!(link.issue(last).is_err());
        assert!(outcome.try_recv().unwrap().is_err());
    }
}

#[test]
fn busy_time_is_bytes_over_bandwidth() {
    let trace = Trace::new(0, 100);
    // A copy takes a thousandth of its transfer, so that a loaded machine does not show.
    let link = emulated("4MB/s", &trace);
    let (mut outcomes, count, numel) = (Vec::new(), 4, 25_000);
    for _ in 0..count {
        for way in [Way::ToHost, Way::ToDevice] {
            let (t, outcome) = transfer(way, counting(numel, Kind::Float), empty(numel, Kind::Float));
            link.issue(t).unwrap();
            outcomes.push(outcome);
        }
    }
    for outcome in outcomes {
        outcome.recv_timeout(PATIENCE).unwrap().unwrap();
    }
    let (traffic, bytes) = (link.traffic(), count * numel * 4);
    let expected = bytes as f64 / link.bandwidth().unwrap();
    for (busy, lane) in [(traffic.busy_to_host, Lane::ToHost), (traffic.busy_to_device, Lane::ToDevice)] {
        assert!((expected..expected * 1.05).contains(&busy), "{busy} s instead of {expected} s");
        assert!((trace.totals().seconds(lane) - busy).abs() < 1e-6, "spans are what was counted");
    }
}

#[test]
fn dropping_a_link_ends_what_is_on_its_way() {
    let link = emulated("1KB/s", &Trace::new(0, 0));
    let outcomes: Vec<_> = (0..3)
        .map(|_| {
            let (t, outcome) = transfer(Way::ToDevice, counting(1 << 20, Kind::Float), empty(1 << 20, Kind::Float));
            link.issue(t).unwrap();
            outcome
        })
        .collect();
    drop(link);
    for outcome in outcomes {
        let error = outcome.try_recv().expect("done ran before drop returned").unwrap_err().to_string();
        assert!(error.contains("closed"), "{error}");
        assert!(outcome.try_recv().is_err(), "done ran twice");
    }
}

#[test]
fn the_last_handle_may_lie_in_done() {
    // A direct link calls `done` while its caller still holds it.
    for link in all(&Trace::new(0, 0)).into_iter().skip(1) {
        let (sender, ended) = unbounded();
        let (test_has_one, until_test_has_none) = unbounded::<()>();
        let held = Arc::clone(&link);
        let done = Box::new(move |_: Outcome| {
            assert!(until_test_has_none.recv_timeout(PATIENCE).is_err_and(|error| error.is_disconnected()));
            drop(held);
            sender.send(()).unwrap();
        });
        let (from, to) = (counting(3, Kind::Float), empty(3, Kind::Float));
        link.issue(Transfer { way: Way::ToHost, from, to, label: "t".into(), moves: false, done }).unwrap();
        drop(link);
        drop(test_has_one);
        ended.recv_timeout(PATIENCE).unwrap();
    }
}

#[test]
fn host_memory_is_booked_to_the_callers_heap() {
    let heap = zf_sys::heap::Heap::new("host").unwrap();
    let link = emulated("1GB/s", &Trace::new(0, 0));
    let _inside = heap.enter();
    let memory = link.host_memory(1000, Kind::Float).unwrap();
    assert_eq!(heap.stats().live.total(), 4000);
    drop(memory);
}

#[test]
fn settings_open_links_for_their_devices() {
    let trace = Trace::new(0, 0);
    let emulated: EmulatedConfig = toml::from_str("bandwidth = \"4GB/s\"\nlatency = \"20us\"").unwrap();
    assert_eq!(emulated.latency, Duration::from_micros(20));
    assert_eq!(emulated.open(0, Device::Cpu, &[], &trace).unwrap().bandwidth(), Some(4e9));
    DirectConfig {}.open(0, Device::Cpu, &[], &trace).unwrap();
    for links in [&emulated as &dyn Links, &DirectConfig {}] {
        let error = links.open(0, Device::Cuda(0), &[], &trace).map(|_| ()).unwrap_err();
        assert_eq!(error.exit_code(), 2, "a setting that is wrong");
        assert!(error.to_string().contains("use the link `cuda`"), "{error}");
    }
    let error = CudaConfig {}.open(0, Device::Cpu, &[], &trace).map(|_| ()).unwrap_err();
    assert_eq!(error.exit_code(), 2, "a setting that is wrong");
    assert!(error.to_string().contains("needs a CUDA device, found Cpu"), "{error}");
    if !zf_sys::device::cuda_available() {
        assert!(CudaConfig {}.open(0, Device::Cuda(0), &[], &trace).is_err());
    }
    let error = emulated.open(0, Device::Cpu, &[100_000], &trace).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("core 100000"), "{error}");
}

#[test]
fn a_gpu_is_reached_both_ways() {
    if !zf_sys::device::cuda_available() {
        return;
    }
    let (gpu, trace) = (Device::Cuda(0), Trace::new(0, 10));
    let link = CudaConfig {}.open(0, gpu, &[], &trace).unwrap();
    let numel = 1 << 22;
    // The copy waits for what its thread gave the device before.
    let computed = Tensor::arange(numel, (Kind::Float, gpu)) * 2.0;
    let (down, arrived) = transfer(Way::ToHost, computed, link.host_memory(numel as usize, Kind::Float).unwrap());
    link.issue(down).unwrap();
    let host = arrived.recv_timeout(PATIENCE).unwrap().unwrap().to;
    assert!(host.equal(&(counting(numel, Kind::Float) * 2.0)));
    let (up, arrived) = transfer(Way::ToDevice, host, Tensor::zeros([numel], (Kind::Float, gpu)));
    link.issue(up).unwrap();
    let Arrived { from, to } = arrived.recv_timeout(PATIENCE).unwrap().unwrap();
    assert!(to.to_device(Device::Cpu).equal(&from));
    let traffic = link.traffic();
    assert_eq!((traffic.to_host, traffic.to_device), (numel as u64 * 4, numel as u64 * 4));
    assert!(traffic.busy_to_host > 0.0 && traffic.busy_to_device > 0.0);
}
