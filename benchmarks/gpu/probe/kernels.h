#pragma once

// The probe's kernels, as PTX, which the driver compiles for its GPU. Every kernel ends by itself.

namespace ringcomm::probe {

/// probe_hold: each block runs for limit_ns, and notes its times, place and longest pause, which is
/// long where another process had the GPU. probe_follow: waits for
/// an address, and reads 4 bytes there.
inline constexpr char kPtx[] = R"(
.version 7.0
.target sm_80
.address_size 64
.visible .entry probe_hold(.param .align 8 .b8 work[16]) {
  .reg .pred %ended;
  .reg .b32 %block, %sm;
  .reg .b64 %words, %limit, %at, %began, %now, %last, %spent, %pause, %place, %one;
  ld.param.u64 %words, [work];
  ld.param.u64 %limit, [work+8];
  mov.u64 %began, %globaltimer;
  mov.u64 %last, %began;
  mov.u64 %pause, 0;
  mov.u32 %block, %ctaid.x;
  mad.wide.u32 %at, %block, 32, %words;
  mov.u32 %sm, %smid;
  cvt.u64.u32 %place, %sm;
  st.relaxed.sys.u64 [%at+64], %began;
  st.relaxed.sys.u64 [%at+80], %place;
  mov.u64 %one, 1;
  st.relaxed.sys.u64 [%words], %one;
again:
  mov.u64 %now, %globaltimer;
  sub.u64 %spent, %now, %last;
  max.u64 %pause, %pause, %spent;
  mov.u64 %last, %now;
  sub.u64 %spent, %now, %began;
  setp.ge.u64 %ended, %spent, %limit;
  @!%ended bra again;
  st.relaxed.sys.u64 [%at+72], %now;
  st.relaxed.sys.u64 [%at+88], %pause;
  ret;
}
.visible .entry probe_follow(.param .align 8 .b8 work[16]) {
  .reg .pred %ended, %known;
  .reg .b32 %value;
  .reg .b64 %words, %limit, %began, %now, %spent, %address, %wide, %one;
  ld.param.u64 %words, [work];
  ld.param.u64 %limit, [work+8];
  mov.u64 %began, %globaltimer;
  mov.u64 %one, 1;
  st.relaxed.sys.u64 [%words], %one;
again:
  ld.acquire.sys.u64 %address, [%words+8];
  setp.ne.u64 %known, %address, 0;
  @%known bra read;
  mov.u64 %now, %globaltimer;
  sub.u64 %spent, %now, %began;
  setp.ge.u64 %ended, %spent, %limit;
  @!%ended bra again;
  ret;
read:
  ld.u32 %value, [%address];
  cvt.u64.u32 %wide, %value;
  st.relaxed.sys.u64 [%words+16], %wide;
  st.release.sys.u64 [%words+24], %one;
  ret;
}
)";

/// probe_cluster: each block notes how many blocks its cluster has.
inline constexpr char kClusterPtx[] = R"(
.version 7.8
.target sm_90
.address_size 64
.visible .entry probe_cluster(.param .align 8 .b8 work[16]) {
  .reg .b32 %block, %num;
  .reg .b64 %words, %at, %wide;
  ld.param.u64 %words, [work];
  mov.u32 %block, %ctaid.x;
  mad.wide.u32 %at, %block, 32, %words;
  mov.u32 %num, %cluster_nctaid.x;
  cvt.u64.u32 %wide, %num;
  barrier.cluster.arrive.aligned;
  barrier.cluster.wait.aligned;
  st.relaxed.sys.u64 [%at+88], %wide;
  ret;
}
)";

}  // namespace ringcomm::probe
