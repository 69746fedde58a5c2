export function KeysPage() {
  return <div class="head"><h1>Keys</h1></div>;
}
