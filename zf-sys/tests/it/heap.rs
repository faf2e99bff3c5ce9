use std::sync::mpsc;
use std::thread;

use tch::{Device, Kind, Tensor};
use zf_sys::heap::{ByCategory, Category, Heap, HeapStats, tag};

use crate::{F32, leaf, values};

const MIB: i64 = 1 << 20;

fn bytes(count: i64) -> Tensor {
    Tensor::f_empty([count], (Kind::Uint8, Device::Cpu)).unwrap()
}

fn by(pairs: &[(Category, i64)]) -> ByCategory {
    let mut all = ByCategory::default();
    for &(category, amount) in pairs {
        all[category] += amount;
    }
    all
}

#[test]
fn books_exact_bytes_by_category_and_splits_the_peak() {
    let heap = Heap::new("a").unwrap();
    let _inside = heap.enter();
    let first = {
        let _tag = tag(Category::Parameters);
        bytes(1001)
    };
    let (second, third) = {
        let _tag = tag(Category::Gradients);
        let second = bytes(70);
        let third = {
            let _tag = tag(Category::Optimizer);
            bytes(3)
        };
        (second, third)
    };
    let fourth = bytes(10);
    let all =
        by(&[(Category::Parameters, 1001), (Category::Gradients, 70), (Category::Optimizer, 3), (Category::Other, 10)]);
    assert_eq!(heap.stats(), HeapStats { live: all, peak: 1084, at_peak: all, cached: 0, room: None });

    drop((second, third));
    let fifth = {
        let _tag = tag(Category::Activations);
        bytes(72)
    };
    // 1083 bytes are live, one less than before, so the peak keeps its own split.
    let now = by(&[(Category::Parameters, 1001), (Category::Activations, 72), (Category::Other, 10)]);
    assert_eq!(heap.stats(), HeapStats { live: now, peak: 1084, at_peak: all, cached: 0, room: None });

    let sixth = bytes(2);
    drop(sixth);
    let higher = by(&[(Category::Parameters, 1001), (Category::Activations, 72), (Category::Other, 12)]);
    assert_eq!(heap.stats(), HeapStats { live: now, peak: 1085, at_peak: higher, cached: 0, room: None });

    drop((first, fourth));
    heap.reset_peak();
    let left = by(&[(Category::Activations, 72)]);
    assert_eq!(heap.stats(), HeapStats { live: left, peak: 72, at_peak: left, cached: 0, room: None });
    drop(fifth);
    let rest = heap.stats();
    assert_eq!((rest.live.total(), rest.peak, rest.at_peak), (0, 72, left));
}

#[test]
fn guards_nest_and_restore() {
    assert!(Heap::current().is_none());
    let (outer, inner) = (Heap::new("outer").unwrap(), Heap::new("inner").unwrap());
    let mut kept = Vec::new();
    {
        let _outer = outer.enter();
        kept.push(bytes(1));
        {
            let _inner = inner.enter();
            assert_eq!(Heap::current().unwrap().name(), "inner");
            kept.push(bytes(10));
        }
        assert_eq!(Heap::current().unwrap().name(), "outer");
        kept.push(bytes(100));
    }
    assert!(Heap::current().is_none());
    kept.push(bytes(1000));
    assert_eq!(outer.stats().live.total(), 101);
    assert_eq!(inner.stats().live.total(), 10);
}

#[test]
fn a_forgotten_guard_does_not_outlive_its_thread() {
    let heap = Heap::new("forgotten").unwrap();
    let inside = heap.clone();
    let tensor = thread::spawn(move || {
        std::mem::forget(inside.enter());
        bytes(9)
    })
    .join()
    .unwrap();
    assert_eq!(heap.stats().live.total(), 9);
    drop(heap);
    drop(tensor);
}

#[test]
fn a_free_from_another_thread_or_heap_is_booked_where_the_block_was_made() {
    let heap = Heap::new("maker").unwrap();
    let other = Heap::new("freer").unwrap();
    let tensor = {
        let _inside = heap.enter();
        let _tag = tag(Category::Buffers);
        bytes(555)
    };
    assert_eq!(heap.stats().live, by(&[(Category::Buffers, 555)]));
    let inside = other.clone();
    thread::spawn(move || {
        let _inside = inside.enter();
        let _tag = tag(Category::Optimizer);
        drop(tensor);
    })
    .join()
    .unwrap();
    assert_eq!(heap.stats().live, ByCategory::default());
    assert_eq!(other.stats().live, ByCategory::default());
    assert_eq!(other.stats().peak, 0);
}

#[test]
fn a_block_outlives_its_heap() {
    let heap = Heap::new("short-lived").unwrap();
    let (small, large) = {
        let _inside = heap.enter();
        (values(&[16], 0.0), values(&[MIB], 0.0))
    };
    let expected = values(&[16], 0.0);
    drop(heap);
    assert_eq!(small, expected);
    drop((small, large));
}

#[test]
fn blocks_of_the_former_allocator_stay_valid() {
    let before = values(&[MIB], 0.5);
    let heap = Heap::new("late").unwrap();
    let _inside = heap.enter();
    assert_eq!(
        f64::try_from(before.sum(Kind::Double)).unwrap(),
        f64::try_from(values(&[MIB], 0.5).sum(Kind::Double)).unwrap()
    );
    drop(before);
    assert_eq!(heap.stats().live.total(), 0);
}

#[test]
fn large_blocks_are_kept_for_the_same_size_and_bounded_by_what_was_live() {
    let heap = Heap::new("cache").unwrap();
    let _inside = heap.enter();
    drop(bytes(3 * MIB));
    assert_eq!((heap.stats().live.total(), heap.stats().cached), (0, 3 * MIB));
    // A block of another size may not take it, and makes room for itself: 2 live and 3 kept are more than ever lived.
    drop(bytes(2 * MIB));
    assert_eq!((heap.stats().live.total(), heap.stats().cached), (0, 2 * MIB));
    // The kept block stays while it fits beside what is live, and goes when small blocks need the room.
    let held = bytes(MIB);
    assert_eq!(heap.stats().cached, 2 * MIB);
    let small = bytes(1);
    assert_eq!((heap.stats().live.total(), heap.stats().cached), (MIB + 1, 0));
    drop((held, small));
}

#[test]
fn a_kept_block_is_taken_again_or_released() {
    let heap = Heap::new("again").unwrap();
    let _inside = heap.enter();
    let block = bytes(3 * MIB);
    let address = block.data_ptr();
    drop(block);
    let block = bytes(3 * MIB);
    assert_eq!(block.data_ptr(), address);
    assert_eq!(heap.stats().cached, 0);
    // Sizes that round up to the same page fit, too; bytes are those asked for.
    drop(block);
    let block = bytes(3 * MIB - 7);
    assert_eq!(block.data_ptr(), address);
    assert_eq!(heap.stats().live.total(), 3 * MIB - 7);
    drop(block);
    assert_eq!(heap.stats().cached, 3 * MIB - 7);
    heap.release_cached();
    assert_eq!((heap.stats().cached, heap.stats().peak), (0, 3 * MIB));
}

#[test]
fn small_blocks_are_not_kept() {
    let heap = Heap::new("small").unwrap();
    let _inside = heap.enter();
    drop(bytes(MIB - 1));
    assert_eq!(heap.stats().cached, 0);
}

#[test]
fn data_are_aligned_and_empty_tensors_cost_nothing() {
    let heap = Heap::new("aligned").unwrap();
    let _inside = heap.enter();
    for count in [1, 63, 64, 65, 4096, MIB, MIB + 1] {
        let tensor = bytes(count);
        assert_eq!(tensor.data_ptr() as usize % 64, 0, "{count} bytes");
        assert_eq!(heap.stats().live.total(), count);
    }
    let empty = Tensor::f_empty([0], F32).unwrap();
    assert_eq!(heap.stats().live.total(), 0);
    drop(empty);
    assert_eq!(heap.stats().live.total(), 0);
}

#[test]
fn matrix_products_and_convolutions_work_on_this_allocator() {
    // oneDNN takes scratch memory by `raw_allocate`, which has demands of its own.
    let heap = Heap::new("onednn").unwrap();
    let _inside = heap.enter();
    let x = values(&[2, 8, 33, 33], 0.0);
    let w = values(&[16, 8, 3, 3], 0.1);
    let y = x.f_conv2d(&w, None::<Tensor>, [1, 1], [1, 1], [1, 1], 1).unwrap();
    assert_eq!(y.size(), [2, 16, 33, 33]);
    let a = values(&[65, 130], 0.0).to_kind(Kind::BFloat16);
    let product = a.f_matmul(&a.tr()).unwrap();
    assert_eq!(product.size(), [65, 65]);
    drop((x, w, y, a, product));
    assert_eq!(heap.stats().live.total(), 0);
}

#[test]
fn rank_threads_are_accounted_separately() {
    let (send, receive) = mpsc::channel();
    let ranks: Vec<_> = (1..=4_i64)
        .map(|rank| {
            let send = send.clone();
            thread::spawn(move || {
                zf_sys::threads::set_operator_threads(1).unwrap();
                let heap = Heap::new(format!("rank {rank}")).unwrap();
                let _inside = heap.enter();
                let x = leaf(&[1000 * rank], 0.0);
                for _ in 0..50 {
                    let loss = (&x * &x).f_sum(Kind::Float).unwrap();
                    zf_sys::autograd::backward(&[loss], &[None], false).unwrap();
                }
                let live = heap.stats().live.total();
                drop(x);
                send.send((rank, live, heap.stats().live.total())).unwrap();
            })
        })
        .collect();
    for rank in ranks {
        rank.join().unwrap();
    }
    drop(send);
    let mut seen: Vec<_> = receive.iter().collect();
    seen.sort_unstable();
    // The leaf and its gradient, float32.
    assert_eq!(seen, (1..=4).map(|rank| (rank, 8000 * rank, 0)).collect::<Vec<_>>());
}
