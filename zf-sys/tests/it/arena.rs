//! Heaps of fixed size.

use tch::{Device, Kind, Tensor};
use zf_sys::heap::{ByCategory, Category, Heap, phase, retag, tag};

use crate::{F32, leaf, values};

const HEADER: i64 = 64;

fn bytes(count: i64) -> Result<Tensor, tch::TchError> {
    Tensor::f_empty([count], (Kind::Uint8, Device::Cpu))
}

#[test]
fn a_refusal_is_an_error_with_the_figures() {
    let heap = Heap::with_limit("card 3", 8200).unwrap();
    assert_eq!(heap.limit(), Some(8192), "in multiples of 64");
    let _inside = heap.enter();
    assert_eq!(heap.last_refusal().unwrap(), None);
    let held = {
        let _tag = tag(Category::Parameters);
        Tensor::f_zeros([1000], F32).unwrap()
    };
    let error = {
        let _tag = tag(Category::Activations);
        let _phase = phase("forward");
        Tensor::f_zeros([1009], F32).unwrap_err().to_string()
    };
    let refusal = heap.last_refusal().unwrap().expect("one was refused");
    assert!(error.contains(&refusal.message), "{error:?} {refusal:?}");
    for part in ["heap 'card 3' is full", "4036 bytes was wanted", "4000 bytes are live in 8192"] {
        assert!(error.contains(part), "{part:?} is missing in {error:?}");
    }
    let room = heap.room().unwrap();
    // 4000 bytes take 4032, and every block has a header.
    assert_eq!((room.free, room.largest_free), (8192 - 4032 - 2 * HEADER, 8192 - 4032 - 2 * HEADER));
    assert_eq!((refusal.number, refusal.asked, refusal.category), (1, 4036, Category::Activations));
    assert_eq!((refusal.phase, refusal.room), (Some("forward"), room));
    let mut live = ByCategory::default();
    live[Category::Parameters] = 4000;
    assert_eq!(refusal.live, live);
    assert_eq!((heap.stats().live, heap.stats().peak), (live, 4000), "a refused allocation must not be booked");
    assert!(!refusal.is_fragmentation());

    // To the last byte, and all of it after a free.
    let rest = bytes(room.largest_free).unwrap();
    assert_eq!(heap.room().unwrap().free, 0);
    drop((held, rest));
    drop(bytes(8192 - HEADER).unwrap());
    assert!(bytes(8192 - HEADER + 1).is_err());
    let second = heap.last_refusal().unwrap().unwrap();
    assert_eq!((second.number, second.phase), (2, None));
}

#[test]
fn free_memory_in_pieces_is_told_from_none() {
    let heap = Heap::with_limit("pieces", 64 << 10).unwrap();
    let _inside = heap.enter();
    let mut blocks: Vec<_> = (0..64).map(|_| Some(bytes(960).unwrap())).collect();
    assert_eq!(heap.room().unwrap().free, 0);
    blocks.iter_mut().step_by(2).for_each(|block| drop(block.take()));
    let room = heap.room().unwrap();
    assert_eq!((room.free, room.largest_free), (32 * 960, 960));
    assert!((room.contiguity() - 1.0 / 32.0).abs() < 1e-12);
    assert!(bytes(961).is_err());
    assert!(heap.last_refusal().unwrap().unwrap().is_fragmentation());
    // Once the blocks between go, the pieces are one.
    blocks.clear();
    let room = heap.room().unwrap();
    assert_eq!((room.free, room.largest_free), ((64 << 10) - HEADER, (64 << 10) - HEADER));
    assert_eq!(room.contiguity(), 1.0);
}

#[test]
fn a_backward_pass_ends_with_the_error_and_the_heap_recovers() {
    let heap = Heap::with_limit("tight", 2_000_000).unwrap();
    let _inside = heap.enter();
    let x = leaf(&[100_000], 0.0);
    let before = heap.stats().live.total();
    let y = x.f_sin().unwrap().f_sum(Kind::Float).unwrap();
    let ballast = bytes(700_000).unwrap();
    let error = zf_sys::autograd::backward(&[y], &[None], false).unwrap_err().to_string();
    assert!(error.contains(&heap.last_refusal().unwrap().unwrap().message), "{error}");
    drop(ballast);
    assert_eq!(heap.stats().live.total(), before);
    let y = x.f_sin().unwrap().f_sum(Kind::Float).unwrap();
    zf_sys::autograd::backward(&[y], &[None], false).unwrap();
}

#[test]
fn retagged_memory_moves_between_categories() {
    let heap = Heap::with_limit("retag", 1 << 20).unwrap();
    let _inside = heap.enter();
    let x = bytes(1000).unwrap();
    retag(&x, Category::Gradients).unwrap();
    assert_eq!((heap.stats().live[Category::Gradients], heap.stats().live[Category::Other]), (1000, 0));
    drop(x);
    assert_eq!(heap.stats().live, ByCategory::default());
}

#[test]
fn operators_compute_the_same_on_it() {
    let compute = || {
        let x = values(&[2, 8, 33, 33], 0.0);
        let w = values(&[16, 8, 3, 3], 0.1);
        let y = x.f_conv2d(&w, None::<Tensor>, [1, 1], [1, 1], [1, 1], 1).unwrap();
        let a = y.f_reshape([32, -1]).unwrap().f_to_kind(Kind::BFloat16).unwrap();
        a.f_matmul(&a.tr()).unwrap().f_to_kind(Kind::Float).unwrap()
    };
    let expected = compute();
    let heap = Heap::with_limit("operators", 16 << 20).unwrap();
    let _inside = heap.enter();
    let found = compute();
    crate::assert_same_bits(&found, &expected, "matrix product of a convolution");
    drop(found);
    assert_eq!(heap.room().unwrap().free, (16 << 20) - HEADER);
}

#[test]
fn a_block_outlives_its_heap_and_its_pages_go_back() {
    let heap = Heap::with_limit("short-lived", 256 << 20).unwrap();
    let (small, large) = {
        let _inside = heap.enter();
        (values(&[16], 0.0), Tensor::f_ones([32 << 20], F32).unwrap())
    };
    let expected = values(&[16], 0.0);
    let resident = || -> u64 {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    };
    let full = resident();
    drop(large);
    drop(heap);
    // 128 MiB were touched; other tests may take some meanwhile where all are in one process.
    assert!(full - resident() > 64 << 20, "{full} {}", resident());
    assert_eq!(small, expected);
}

#[test]
fn senseless_sizes_are_refused() {
    assert!(Heap::with_limit("none", 0).unwrap_err().to_string().contains("from 4096"));
    assert!(Heap::with_limit("small", Heap::SMALLEST - 1).is_err());
    let error = Heap::with_limit("everything", 1 << 60).unwrap_err().to_string();
    assert!(error.contains("address range"), "{error}");
}
