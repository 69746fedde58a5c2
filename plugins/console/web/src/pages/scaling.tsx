export function ScalingPage() {
  return <div class="head"><h1>Scaling</h1></div>;
}
