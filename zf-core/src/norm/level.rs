//! One loop, compiled for several instruction sets, chosen at run time.

use std::sync::OnceLock;

/// A pass over memory. Its `run` must be `#[inline(always)]`, and so must everything in it, so that [`Level::run`] can
/// compile it anew for each instruction set.
pub trait Kernel {
    /// What the pass returns.
    type Output;

    /// The pass.
    fn run(self) -> Self::Output;
}

/// An instruction set to compile a [`Kernel`] for. The results are the same bits on all of them, since the compiler
/// neither fuses nor reorders floating-point operations by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// What the target guarantees (SSE2 on x86-64).
    Portable,
    /// 256-bit vectors.
    Avx2,
    /// 512-bit vectors (AVX-512 F, BW, DQ and VL, which every AVX-512 processor since 2017 has).
    Avx512,
}

impl Level {
    /// The best level of this processor; asked once per process.
    pub fn detect() -> Self {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| *Self::available().last().expect("the portable level is always available"))
    }

    /// All levels that this processor can run, the best one last.
    pub fn available() -> &'static [Self] {
        const ALL: [Level; 3] = [Level::Portable, Level::Avx2, Level::Avx512];
        let mut count = 1;
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            count = 2;
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                count = 3;
            }
        }
        &ALL[..count]
    }

    /// Runs `kernel` as compiled for this level, or for the best available one below it.
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        {
            let level = self.min(Self::detect());
            if level == Self::Avx512 {
                // SAFETY: `detect` found these features on this processor.
                return unsafe { avx512(kernel) };
            }
            if level == Self::Avx2 {
                // SAFETY: as above.
                return unsafe { avx2(kernel) };
            }
        }
        kernel.run()
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

#[cfg(test)]
mod tests {
    use super::Level;

    #[test]
    fn best_level_is_available() {
        assert_eq!(Level::available().last(), Some(&Level::detect()));
        assert_eq!(Level::available().first(), Some(&Level::Portable));
    }
}
