use cpu::{Element, Isa, measure::LinearBench};
fn main() {
    let mut shapes = vec![];
    for _ in 0..30 {
        shapes.extend([(960, 576), (576, 576), (3072, 576), (576, 1536)]);
    }
    shapes.push((49152, 576));
    for isa in Isa::ALL {
        for threads in [1, 2] {
            if isa == Isa::Portable && threads == 1 {
                continue;
            }
            let mut b = LinearBench::new(isa, Element::Bf16, threads, &shapes);
            let bytes = b.num_bytes() as f64;
            for m in [1, 2, 4, 8, 16, 64, 256] {
                if isa != Isa::Avx512Bf16 && m > 16 {
                    continue;
                }
                let n = if m > 16 { 3 } else { 15 };
                let mut t: Vec<f64> = (0..n).map(|_| b.linears(m)).collect();
                t.sort_by(f64::total_cmp);
                let mut r: Vec<f64> = (0..5).map(|_| b.streaming_read()).collect();
                r.sort_by(f64::total_cmp);
                let (t, r) = (t[n / 2], r[2]);
                println!(
                    "{isa} threads {threads} M={m}: {:.2} ms {:.1} GB/s {:.0} GFLOP/s | read {:.2} ms {:.1} GB/s ratio {:.2}",
                    t * 1e3,
                    bytes / t / 1e9,
                    bytes * m as f64 / t / 1e9,
                    r * 1e3,
                    bytes / r / 1e9,
                    r / t
                );
            }
        }
    }
}
